// Command image packs the program into a container image for several architectures, without a container engine.
//
// It promises an OCI image layout in one tar file: an index with an image per architecture, which contains the program and
// symbolic links with the names of its roles. It also packs images of other programs, for tests. The same programs, name and
// time yield the same bytes. It never builds a program and never connects to a registry. Start reading at pack.
package main
