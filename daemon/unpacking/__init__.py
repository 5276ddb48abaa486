"""Files that contain images: archives, documents and videos, whose members become images of their own."""
