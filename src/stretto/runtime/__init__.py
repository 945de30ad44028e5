"""Where the roles of a run work: in this process (``inline``), or in virtual time (``sim``)."""
