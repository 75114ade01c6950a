package follow

// RunWith is Run with another function that opens the kernel's trace.
var RunWith = run
