"""Runtimes: roles work in this process (``inline``), in processes of their own (``local``), or in
virtual time (``sim``).
"""
