"""Long recordings become clips: cut at pauses, heard by a model, and matched with what a person wrote down."""
