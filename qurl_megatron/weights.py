"""The UAQ fold under its public name; it lives in ``checkpoints.uaq``."""

from qurl_megatron.checkpoints.uaq import fold_uaq as fold_uaq
from qurl_megatron.checkpoints.uaq import unfold_uaq as unfold_uaq
