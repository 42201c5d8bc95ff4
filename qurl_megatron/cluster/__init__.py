"""``qurl slurm``: from a recipe and a description of the cluster to a job, and its supervisor."""
