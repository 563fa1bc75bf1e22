"""What a run says about itself: metrics and samples in; files, TensorBoard, console and plots out."""
