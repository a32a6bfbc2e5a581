"""HTTP: models served to many at once."""
