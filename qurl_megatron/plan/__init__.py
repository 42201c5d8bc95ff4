"""Which layout a recipe should run in, predicted before there is a machine."""
