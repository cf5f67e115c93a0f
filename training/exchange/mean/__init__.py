"""Operations of a run on the mesh: means by owners, gathers, repeated after a loss."""
