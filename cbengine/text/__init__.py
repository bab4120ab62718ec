"""Text and token ids: tokenizing, detokenization, chat templates, stop strings, grammars, the parts of an answer."""
