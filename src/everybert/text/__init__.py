"""Raw text to token ids: tokenizer, sentences, readers, windows."""
