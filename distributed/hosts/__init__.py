"""Which machines a person named: the hosts file and its schema."""
