"""Models as files and as modules: loading, GGUF, NF4, and direct access to the files of known models."""
