package settings

import (
	"errors"
	"strconv"
)

// Toggle reads a switch.
func Toggle(into *bool, text string) error {
	on, err := strconv.ParseBool(text)
	if err != nil {
		return errors.New("want true or false")
	}
	*into = on
	return nil
}

// Port reads a TCP port; 0 is off.
func Port(into *uint16, text string) error {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return errors.New("want a decimal port from 0 to 65535")
	}
	*into = uint16(n)
	return nil
}
