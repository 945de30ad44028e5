"""Environments of episodes: what answers the policy's turns."""
