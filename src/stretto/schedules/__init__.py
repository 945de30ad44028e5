"""When each piece of work runs. Written against the protocols alone."""
