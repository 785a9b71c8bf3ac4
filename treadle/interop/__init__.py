"""Models from elsewhere and for elsewhere: Hugging Face directories, llm.c's files, GGUF."""
