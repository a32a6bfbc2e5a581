"""What an encoder does, as data and as HTML."""
