"""What makes pages of docs from records: in a checkout alone, no part of the wheel."""
