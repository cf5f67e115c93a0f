"""Processes on far machines with the face of local ones."""
