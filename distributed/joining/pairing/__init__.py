"""What two machines that pair with a code know, say and sign: codes, keys, introductions and the sealed exchange."""
