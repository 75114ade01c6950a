// Command image packs the program into a container image for several architectures, without a container engine.
//
// It promises an OCI image layout in one tar file: an index with an image for each architecture, in which the program is
// the only file beside links for the names of its roles, and a list of what the program is made of (CycloneDX), attached
// to each image and written beside the tar. Images for tests, of other programs, are packed by it, too. The same programs, name and time give the same bytes. It never builds a
// program, and never talks to a registry. Start reading at pack.
package main
