"""Model folders: atomic, hashed, and readable by the ecosystem."""
