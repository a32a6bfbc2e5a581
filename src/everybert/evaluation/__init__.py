"""Scores: GLUE, SQuAD, BLiMP and sweeps; and a check of labelled data."""
