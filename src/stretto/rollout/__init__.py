"""Generation engines behind the Generator protocol."""
