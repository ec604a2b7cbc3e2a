"""Tokenizers: text ↔ ids."""
