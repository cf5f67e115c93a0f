"""What this computer lends to those that it has joined: which programs, in which box, and when."""
