"""The encoder: configuration, ragged batches, blocks and heads."""
