"""Rendering of rows to tokens: chat templates, tokenizers, images, and the formats of other libraries."""
