"""Models as files and as modules: loading, GGUF, NF4, and what the files of known models say."""
