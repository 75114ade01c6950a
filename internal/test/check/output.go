package check

import "bytes"

// Output is an output of a program that calls First at its first line.
type Output struct {
	First func()
	text  bytes.Buffer // not embedded because it has a WriteString
}

// Write implements io.Writer.
func (o *Output) Write(text []byte) (int, error) {
	n, err := o.text.Write(text)
	if o.First != nil && bytes.ContainsRune(text, '\n') {
		o.First()
		o.First = nil
	}
	return n, err
}

// String returns the whole output.
func (o *Output) String() string { return o.text.String() }
