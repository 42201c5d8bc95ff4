"""The ground floor: errors, files, processes and time, for every part above; no Megatron here."""
