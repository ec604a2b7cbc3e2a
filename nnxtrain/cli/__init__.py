"""The command line: words, questions about keys, and answers without a run."""
