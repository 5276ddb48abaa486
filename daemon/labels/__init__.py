"""What people say about images: read from annotation tools, kept beside the answers, and held against them."""
