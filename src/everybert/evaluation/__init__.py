"""Scores: GLUE, SQuAD, BLiMP, and checks of data and speed."""
