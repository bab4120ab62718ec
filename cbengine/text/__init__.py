"""Text and token ids: tokenizing, incremental detokenization, chat templates."""
