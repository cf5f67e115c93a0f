"""Which machines there are: what the network says, what this computer knows, and which entries are one machine."""
