"""Environments of episodes, which answer the policy's turns."""
