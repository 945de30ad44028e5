_stretto() {
  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} prefix= offers=
  if [[ $before == = ]]; then  # bash makes three words of --option=value
    before=${COMP_WORDS[COMP_CWORD-2]}
  elif [[ $current == = ]]; then
    current=
  elif [[ $current == --*=* ]]; then
    before=${current%%=*} prefix=${current%%=*}= current=${current#*=}
  fi
  case "${COMP_WORDS[1]} $before" in
@VALUES@
  *) case "$COMP_CWORD ${COMP_WORDS[1]}" in
@WORDS@
    esac ;;
  esac
  COMPREPLY=($(compgen -P "$prefix" -W "$offers" -- "$current"))
}
complete -o default -F _stretto stretto
