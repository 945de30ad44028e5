"""Language models: find, load, check, run and save. Import the modules; this one stays light."""
