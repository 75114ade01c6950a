// Command release makes the parts of a release that need libraries, verifies a whole release, and pushes it: hack/release.sh
// builds the rest and calls it.
//
// It promises that the same programs yield the same bytes, and that verify names each file that is missing, additional, changed
// or of another version. It never builds a program, and connects only to the registry that push is given. Start reading at
// verify.
package main
