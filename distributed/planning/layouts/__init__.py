"""How a model that no machine holds is divided: candidate layouts, their cuts, times, memory and reasons."""
