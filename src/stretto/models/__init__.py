"""Language models: find, load, check, run and save. Import the modules, as this one stays light."""
