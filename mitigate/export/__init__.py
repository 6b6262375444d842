"""Take a trained compressor out of a study, and load it again."""
