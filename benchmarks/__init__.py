"""Beside `qurl bench`, in a checkout alone: no part of the wheel."""
