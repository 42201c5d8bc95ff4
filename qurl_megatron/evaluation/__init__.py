"""Accuracy on benchmark files, and studies: grids of runs with one table of results.

command, eval_plan, ask, results       ``qurl eval``: Avg@1, Avg@k, pass@k and their intervals
plan, study, study_results             ``qurl study``: cells, their runs, the page of results
"""
