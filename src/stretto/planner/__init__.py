"""Memory, traffic and time of the four PPO models on many GPUs, on paper."""
