"""The packaged recipes, and what they read; :mod:`stretto.config.recipes` loads them."""
