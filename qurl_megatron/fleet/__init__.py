"""The engines as the leading rank sees them: started, adopted, asked, watched and healed."""
