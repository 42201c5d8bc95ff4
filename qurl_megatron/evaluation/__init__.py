"""Accuracy on benchmark files, and studies: grids of runs with their tables and pictures.

command, evaluate, results    ``qurl eval``: Avg@1, Avg@k, pass@k and how far to trust them
study_command, runner, tables ``qurl study``: cells, their runs, the page of results
rescore                       ``qurl rescore``: recorded samples scored again
"""
