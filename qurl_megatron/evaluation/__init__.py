"""Accuracy on benchmark files, and studies: grids of runs with one table of results.

eval_plan, benchmarks, evaluate, results   ``qurl eval``: Avg@1, Avg@k, pass@k and their intervals
study_plan, study, study_results, pictures ``qurl study``: cells, their runs, the page of results
"""
