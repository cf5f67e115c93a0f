"""What a person sees: command-line displays, screens and reports. Never trains, never opens a socket."""
