"""What tests share: event loops, leak checks, the loop guard, models and their reference answers."""
