"""The only code that knows both sides: event loops on one, the engine thread on the other."""
